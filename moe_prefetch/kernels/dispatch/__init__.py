"""Tokens to the ranks that hold their experts, and back."""
