#!/usr/bin/env bash
# Puts etcd and kube-apiserver into the directory .kubernetes: `make kubernetes`. With the argument `node` also the programs of a
# real node: kubelet, kube-scheduler, kube-controller-manager (from the first two sources only), containerd, runc, network plugins.
# Sources in this order: $KUBEBUILDER_ASSETS (any version), ../shared/kubernetes, a build of Debian's source package (about 20
# minutes on two cores, 4 GB). The system's packages and apt's configuration are not changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=$PWD/.kubernetes
shared=$(dirname "$PWD")/shared/kubernetes
mkdir -p "$cache"
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT

from_assets() {
    local name=$1 path=${KUBEBUILDER_ASSETS:-}/$1
    [ -n "${KUBEBUILDER_ASSETS:-}" ] && [ -x "$path" ] && ln -sf "$path" "$cache/$name"
}

debian() { # download a package of the configured suite and unpack it without installing it
    local folder
    folder=$(mktemp -d -p "$unpacked")
    (cd "$folder" && { apt-get download -qq "$1" || { apt-get update -qq && apt-get download -qq "$1"; }; } && dpkg-deb -x ./*.deb out)
    echo "$folder/out"
}

get_etcd() {
    from_assets etcd && return
    if command -v etcd >/dev/null; then
        ln -sf "$(command -v etcd)" "$cache/etcd"
    else
        cp "$(debian etcd-server)/usr/bin/etcd" "$cache/etcd"
    fi
}

get_api_server() {
    from_assets kube-apiserver && return
    from_shared kube-apiserver || build_api_server
}

from_shared() {
    [ -f "$shared/$1.xz" ] || return 1
    python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
        "$shared/$1.xz" "$cache/$1.partial"
    chmod +x "$cache/$1.partial"
    mv "$cache/$1.partial" "$cache/$1"
}

get_node() {
    local name folder
    for name in kubelet kube-scheduler kube-controller-manager; do
        [ -x "$cache/$name" ] || from_assets "$name" || from_shared "$name" ||
            { echo "$name is neither in \$KUBEBUILDER_ASSETS nor in $shared: put that of Kubernetes 1.20 there" >&2; exit 2; }
    done
    if [ ! -x "$cache/containerd" ]; then
        echo "unpacking containerd, runc and network plugins of Debian" >&2
        cp "$(debian runc)/usr/sbin/runc" "$(debian busybox-static)/bin/busybox" "$cache/"
        folder=$(debian containernetworking-plugins)
        mkdir -p "$cache/cni"
        cp "$folder"/usr/lib/cni/{bridge,host-local,loopback} "$cache/cni/"
        folder=$(debian containerd)
        cp "$folder"/usr/bin/{containerd-shim-runc-v2,ctr,containerd} "$cache/"
    fi
    "$cache/kubelet" --version
    "$cache/containerd" --version
}

build_api_server() { # Kubernetes 1.20.2 of bookworm, with the two changes it needs for a newer Go
    echo "building kube-apiserver from Debian's source: this takes about 20 minutes" >&2
    local work tree mirror packages
    work=$cache/build tree=$cache/build/gopath/src/k8s.io/kubernetes
    mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial" "$work/gopath/src/k8s.io"
    mirror=$(apt-cache policy | sed -n 's/^ *[0-9]* \(http[^ ]*\) .*/\1/p' | grep -v security | head -1)
    [ -n "$mirror" ] || { echo "apt has no Debian archive among its sources: add one, then run apt-get update" >&2; exit 2; }
    printf 'deb-src %s bookworm main\ndeb %s bookworm main\n' "$mirror" "$mirror" >"$work/apt/sources.list"
    local apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/apt/lists")
    "${apt[@]}" update
    (cd "$work" && "${apt[@]}" source --download-only kubernetes && rm -rf "$tree" && dpkg-source -x --no-check ./*.dsc "$tree")
    packages="golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev"
    (cd "$work/apt" && "${apt[@]}" download $packages && for deb in *.deb; do dpkg-deb -x "$deb" "$work/root"; done)
    rm -rf "$tree/vendor/github.com/modern-go/reflect2"
    cp -r "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$tree/vendor/github.com/modern-go/"
    export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/gopath GO111MODULE=off CGO_ENABLED=0 GOCACHE=$work/cache
    ln -sfn "$work/root/usr/share/go-1.19/src" "$GOROOT/src"
    local go=$GOROOT/bin/go version=-s
    cd "$tree"
    "$go" build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    local inputs
    inputs=$(grep -rl --include=doc.go '+k8s:openapi-gen=true' pkg staging/src | xargs -n1 dirname |
        sed -e 's|^staging/src/|k8s.io/kubernetes/vendor/|' -e 's|^pkg/|k8s.io/kubernetes/pkg/|' | paste -sd,)
    "$work/openapi-gen" --input-dirs "$inputs" --output-package k8s.io/kubernetes/pkg/generated/openapi \
        --output-base "$GOPATH/src" --output-file-base zz_generated.openapi --go-header-file hack/boilerplate/boilerplate.generatego.txt \
        --report-filename /dev/null
    for package in k8s.io/kubernetes/vendor/k8s.io/component-base/version k8s.io/kubernetes/vendor/k8s.io/client-go/pkg/version; do
        version+=" -w -X $package.gitVersion=v1.20.2 -X $package.gitMajor=1 -X $package.gitMinor=20"
    done
    "$go" build -trimpath -tags providerless,dockerless -ldflags "$version" -o "$cache/kube-apiserver" ./cmd/kube-apiserver
}

[ -x "$cache/etcd" ] || get_etcd
[ -x "$cache/kube-apiserver" ] || get_api_server
"$cache/etcd" --version | sed -n 1p
"$cache/kube-apiserver" --version
[ "${1:-}" != node ] || get_node
