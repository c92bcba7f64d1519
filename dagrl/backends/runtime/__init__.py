"""What the engines of several backends share while they run."""
