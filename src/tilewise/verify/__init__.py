"""Any implementation against the reference: outputs, LSE and gradients, over named cases."""
