"""Arguments and outputs: taken apart, compared, copied in and handed out."""
