"""The content-addressed cache: its directory, its entries, its locks, and what decides whether an entry may be used."""
