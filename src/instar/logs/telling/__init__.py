"""What runs come to, in words."""
