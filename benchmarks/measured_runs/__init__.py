"""What validation.py compares with: a file per source of measured runs."""
