# vLLM's own image with vToken beside it. docs/install.md says how to run it.
FROM vllm/vllm-openai:v0.32.0
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src
# Audit log and flight recording: mount a volume here.
VOLUME /state
EXPOSE 8000
ENTRYPOINT ["vtoken", "serve", "--host", "0.0.0.0", "--vtoken-state-dir", "/state", "--vtoken-experimental-cuda"]
