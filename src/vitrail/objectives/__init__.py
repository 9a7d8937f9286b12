"""What models are trained for, one file each."""
