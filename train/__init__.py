"""From conversations to a trained drafter."""
