"""What both services do, as processes."""
