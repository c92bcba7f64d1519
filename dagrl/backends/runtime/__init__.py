"""Code that running engines of several backends share."""
