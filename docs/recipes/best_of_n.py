"""Best of n: many answers to one prompt, the one kept that the model itself finds likeliest."""

import bonsai_jax as bj

N = 16
model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(batch_size=N, activation_bits=16))
sampling = bj.SamplingParams(temperature=1.0, seed=0)  # seeds count up from row to row
outputs = bj.generate(
    model, ["The best name for a cat is"] * N, max_new_tokens=12, sampling=sampling, logprobs=0
)
by_token = [output.logprobs.token.mean() for output in outputs]  # nats a token
best = max(range(N), key=by_token.__getitem__)
print(f"{by_token[best]:.2f} of {min(by_token):.2f} to {max(by_token):.2f}: {outputs[best].text!r}")
