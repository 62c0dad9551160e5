"""Decoding with a drafter, and what it was worth."""
