"""After the last step: the final test, and which best pointers still hold."""
