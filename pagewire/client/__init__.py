"""The client library. `pagewire` exports all of its public names."""
