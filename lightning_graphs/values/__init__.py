"""Arguments, outputs and Python values: taken apart, compared, copied in, put back."""
