"""The record in other tools: TensorBoard, W&B, trackio, MLflow."""
