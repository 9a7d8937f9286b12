"""What is done with trained models: samples, and how good they are."""
