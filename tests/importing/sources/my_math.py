def score(response, answer):
    return float(response.strip() == answer)
