"""What a person looks at: environment block, timeline, report, metrics endpoint."""
