"""What every replay does again on the host: numbers, draws, logs, stores."""
