"""What the hardware is and how the work is spread over it."""
