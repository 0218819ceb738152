"""SLURM: submission as job arrays, what the scheduler says of them, and what runs inside a job."""
