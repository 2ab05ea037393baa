#!/usr/bin/env bash
# Builds the programs of a Kubernetes cluster from Debian's source package `kubernetes`, which Debian itself does
# not build, into FOLDER/bin: all of them, or those named. Takes 20 minutes of two processors and 5 GB. Programs
# that FOLDER/bin has are kept. Needs Debian 12 and root.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: $0 FOLDER [PROGRAM...]" >&2
    exit 2
fi
mkdir -p "$1/bin"
cd "$1"
shift
programs=("$@")
if [ $# -eq 0 ]; then
    programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet)
fi
missing=()
for program in "${programs[@]}"; do
    [ -x "bin/$program" ] || missing+=("$program")
done
if [ ${#missing[@]} -eq 0 ]; then
    exit
fi

apt-get install --yes --no-install-recommends dpkg-dev golang-1.19-go golang-github-modern-go-reflect2-dev
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
# The vendored reflect2 1.0.1 reads maps in a way that Go 1.18 dropped: the API server crashes on custom objects.
reflect2=github.com/modern-go/reflect2
rm --recursive "$source/vendor/$reflect2"
cp --recursive --dereference "/usr/share/gocode/src/$reflect2" "$source/vendor/$reflect2"
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

# The version that nodes and `kubectl version` report; without it kubelets and the API server count as v0.0.0.
version=$(basename "${archives[0]}" .orig.tar.gz)
version=${version#kubernetes_}
version=v${version##*really}
flags=
for package in component-base kubernetes/vendor/k8s.io/component-base kubernetes/vendor/k8s.io/client-go/pkg; do
    flags+=" -X k8s.io/$package/version.gitVersion=$version"
    flags+=" -X k8s.io/$package/version.gitMajor=1 -X k8s.io/$package/version.gitMinor=20"
done
for program in "${missing[@]}"; do
    go build -ldflags "$flags" -o "bin/$program.new" "k8s.io/kubernetes/cmd/$program"
    mv "bin/$program.new" "bin/$program"
    echo "built $PWD/bin/$program"
done
