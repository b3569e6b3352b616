"""Native sparse attention: compressed, selected and near keys, each branch with a gate."""
