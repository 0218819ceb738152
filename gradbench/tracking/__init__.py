"""What an attempt leaves behind: the spool on disk, which is the truth, and its copy in MLflow."""
