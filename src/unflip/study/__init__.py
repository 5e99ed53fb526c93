"""Studies: many runs as one resumable piece of work, and one table at the end."""
