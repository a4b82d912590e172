"""What is known of response lengths: their law, the bias of a schedule, groups like those seen."""
