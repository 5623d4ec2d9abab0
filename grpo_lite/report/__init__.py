"""What is shown to people and programs."""
