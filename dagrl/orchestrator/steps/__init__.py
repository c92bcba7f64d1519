"""The books of the steps under way: which rows there are, where they lie, who gets them, what is told of them."""
