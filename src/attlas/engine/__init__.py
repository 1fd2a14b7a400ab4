"""The only place where softmax(score) is computed."""
