"""Planners of operations: pure functions from a shape to the grown shape and the plan of its tensors."""
