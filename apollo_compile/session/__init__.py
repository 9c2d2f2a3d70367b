"""What happens while a model trains: graphs run, are observed, planned again, and compared with other variants."""
