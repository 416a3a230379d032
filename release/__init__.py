"""What a release is made with: `python -m release`."""
