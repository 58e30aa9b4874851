"""One training step: what it sums, guards, and agrees on across ranks."""
