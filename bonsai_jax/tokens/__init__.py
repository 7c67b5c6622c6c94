"""Text to token ids and back, and chat templates. Imports nothing of the models."""
