"""Which layers and heads of a model rank tokens best: `vtoken calibrate MODEL`, and the profile.

    prompts         prompts of prose with a needle, and the tokens that must survive
    observe         one forward pass of the model, with a hook on every layer's attention
    layer_signals   the signals of a layer
    ranking         how well signals rank needles; the choice of layers and heads
    measure         a model's profile, from all of these
    model_files     the fingerprint of a model's weights
    store           profiles as files
    command         the command line

`vtoken.core.runtime.ranking` uses the profile in the engine.
"""
