"""Reads what the PyTorch profiler wrote on each rank, and says which rank lags and why. Needs no torch."""
