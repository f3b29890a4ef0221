// An RDMA device opened for one process, and memory registered with it. Everything is freed by its owner's destructor.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace millrace::verbs {

// What went wrong, in words that name the call.
class VerbsError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Throws VerbsError with the text of an errno.
[[noreturn]] void fail(const std::string& what, int error);

// Names of devices that have an active port.
std::vector<std::string> usable_devices();

using Gid = std::array<uint8_t, 16>;

// A device, its protection domain and one active port.
class Device {
public:
    // `gid_index` below 0: the first RoCE v2 address with IPv4, else the first RoCE v2 one, else the first of all.
    Device(const std::string& name, int gid_index);

    ibv_context* context() const { return context_.get(); }
    ibv_pd* domain() const { return domain_.get(); }
    uint8_t port() const { return port_; }
    uint8_t gid_index() const { return gid_index_; }
    const Gid& gid() const { return gid_; }
    uint16_t lid() const { return attributes_.lid; }
    // Whether packets carry a global header: always on Ethernet.
    bool routed() const { return attributes_.link_layer == IBV_LINK_LAYER_ETHERNET; }
    // As the enumeration ibv_mtu.
    uint8_t mtu() const { return static_cast<uint8_t>(attributes_.active_mtu); }
    uint32_t message_bytes_max() const { return attributes_.max_msg_sz; }
    // READs that a queue pair may have under way, as asker and as answerer.
    uint8_t reads_max() const { return reads_max_; }

private:
    void choose_port();
    void choose_gid(int wanted);

    template <auto Free>
    struct Freed {
        template <typename T>
        void operator()(T* object) const {
            Free(object);
        }
    };

    std::unique_ptr<ibv_context, Freed<ibv_close_device>> context_;
    std::unique_ptr<ibv_pd, Freed<ibv_dealloc_pd>> domain_;
    ibv_port_attr attributes_{};
    Gid gid_{};
    uint8_t port_ = 0;
    uint8_t gid_index_ = 0;
    uint8_t reads_max_ = 1;
};

// Memory that the device may write and peers may read.
class Region {
public:
    // Memory of this process (or of a GPU, where the driver lets libibverbs pin it).
    Region(std::shared_ptr<Device> device, uint64_t address, uint64_t bytes);
    // A GPU's memory as a dma-buf: `bytes` from `offset` on, which peers address as `address`.
    Region(std::shared_ptr<Device> device, uint64_t address, uint64_t bytes, int dmabuf, uint64_t offset);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    // Peers cannot read it any more, nor the device write it.
    void close();

    uint32_t local_key() const { return region_->lkey; }
    uint32_t remote_key() const { return region_->rkey; }
    uint64_t address() const { return address_; }
    uint64_t bytes() const { return bytes_; }
    bool open() const { return region_ != nullptr; }

private:
    std::shared_ptr<Device> device_;
    uint64_t address_;
    uint64_t bytes_;
    ibv_mr* region_ = nullptr;
};

}  // namespace millrace::verbs
