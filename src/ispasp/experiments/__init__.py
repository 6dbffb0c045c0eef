"""What is measured, and what it is measured on."""
