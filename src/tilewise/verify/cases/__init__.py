"""The cases of each operator, one file each."""
