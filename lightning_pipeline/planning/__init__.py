"""What a pipeline would do and need, and what would make it faster. No Lightning here."""
