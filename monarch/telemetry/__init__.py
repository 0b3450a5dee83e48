"""What a daemon says about itself: counters, reports, health and its log."""
