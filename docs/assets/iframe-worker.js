/* Search runs in a worker, which browsers refuse to a page from the disk. There an iframe takes its place. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.loaded = new Promise((resolve) => {
        this.inner.begin = (scope) => {
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          scope.importScripts = (...urls) =>
            urls.reduce(
              (earlier, script) =>
                earlier.then(
                  () =>
                    new Promise((done) => {
                      const tag = scope.document.createElement("script");
                      tag.src = script;
                      tag.onload = done;
                      scope.document.body.append(tag);
                    })
                ),
              Promise.resolve()
            );
        };
        frame.onload = resolve;
      });
      const begin = this.inner.begin;
      const page = this.inner.document;
      page.open();
      this.inner.begin = begin;
      page.write(`<body><script>begin(window)</script><script src="${url}"></script></body>`);
      page.close();
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
