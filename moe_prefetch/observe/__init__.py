"""What a person looks at: environment block, report, and metrics for Prometheus."""
