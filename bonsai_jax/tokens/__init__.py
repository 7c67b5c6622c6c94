"""Text to token ids and back, and chat templates. Knows no model."""
