"""What is trained: models, their data, their loss."""
