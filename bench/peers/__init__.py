"""The same work by Pagewire and by other programs."""
