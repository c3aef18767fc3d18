"""Growth of a live model with its optimizer, in anyone's training loop."""
