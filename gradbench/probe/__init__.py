"""What the device and the process do while a cell trains: time per phase, and what the driver says."""
