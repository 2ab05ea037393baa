#!/usr/bin/env bash
# Builds the kube-apiserver of Debian's source package `kubernetes`, which Debian itself does not
# build, into the folder given. Takes some minutes and 4 GB. Needs Debian 12 and root.
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
mkdir -p "$1"
cd "$1"

apt-get install --yes --no-install-recommends dpkg-dev golang-1.19-go
mkdir -p lists/partial
# Sources from where this machine has its packages.
apt-get indextargets --format 'deb-src $(REPO_URI) $(RELEASE) main' \
    'Created-By: Packages' 'Component: main' | sort --unique >sources.list
apt=(apt-get -o "Dir::Etc::sourcelist=$PWD/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$PWD/lists")
"${apt[@]}" update
"${apt[@]}" --download-only source kubernetes

source=gopath/src/k8s.io/kubernetes
mkdir -p "$source"
archives=(kubernetes_*.orig.tar.gz)
tar --extract --strip-components=1 --directory="$source" --file="${archives[0]}"
export GO111MODULE=off GOPATH=$PWD/gopath GOCACHE=$PWD/cache CGO_ENABLED=0
PATH=/usr/lib/go-1.19/bin:$PATH

# The one generated file that the source package has not got.
go build -o openapi-gen k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
inputs=$(
    cd "$source"
    for root in vendor/k8s.io/*/ pkg/; do
        # The vendored folders are links.
        (cd "$root" && grep --recursive --files-with-matches --include='*.go' '^// +k8s:openapi-gen=' . || true) |
            sed "s#^\./#$root#"
    done | xargs --max-args=1 dirname | sort --unique |
        grep --invert-match --extended-regexp 'testdata|/test|code-generator|sample-' |
        sed 's#^#k8s.io/kubernetes/#' | paste --serial --delimiters=,
)
# Vendored packages are found from inside the sources alone.
violations=$PWD/violations generator=$PWD/openapi-gen
(
    cd "$source"
    "$generator" --output-file-base zz_generated.openapi \
        --output-package k8s.io/kubernetes/pkg/generated/openapi \
        --go-header-file hack/boilerplate/boilerplate.generatego.txt \
        --input-dirs "$inputs" --output-base "$GOPATH/src" --report-filename "$violations"
)

go build -o kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver
echo "built $PWD/kube-apiserver"
