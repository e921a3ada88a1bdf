"""The call itself: from a stub's annotations to a callable that enters the loaded library."""
