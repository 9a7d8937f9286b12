"""Data, labels and predictions in the browser: layers of what lies at paths, a server for one page, its state."""
