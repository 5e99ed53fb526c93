"""Other engines, each in a file of its own. All are optional: what is absent or fails is a row with the reason."""
