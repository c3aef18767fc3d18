"""How a model changes: plans over named tensors, made from axes and applied to values."""
